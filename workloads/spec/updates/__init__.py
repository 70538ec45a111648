"""What updates weights: its fields and their words, and what an optimizer keeps and moves. No torch here."""
