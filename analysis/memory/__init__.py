"""Memory of one rank, from rows or by the closed form: one module a question."""
