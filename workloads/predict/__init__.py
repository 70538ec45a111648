"""Step time and memory of rows of any table, in closed forms with parameters fitted to measured rows."""
