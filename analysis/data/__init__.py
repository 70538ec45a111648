"""The values behind the figures, one module a question: frame in, tidy frame out."""
