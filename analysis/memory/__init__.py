"""Memory of one rank, from rows or by the closed form: what several figures of memory calculate with."""
