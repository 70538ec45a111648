"""Step time and memory of rows of any table, in closed forms whose quantities are fitted to measured rows."""
