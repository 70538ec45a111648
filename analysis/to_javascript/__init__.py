"""Translation of closed forms from Python to JavaScript, for the page: a plain subset of the language, and no more."""
