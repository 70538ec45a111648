"""Memory of one rank, from rows or by the closed form: the calculations behind the memory figures."""
