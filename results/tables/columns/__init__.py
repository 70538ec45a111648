"""The columns of every table, with their types, units and meaning: the only place where columns are defined."""
