"""What nodes and their devices are joined by, and whose devices they are. No torch here."""
