"""The plan: verdict, prediction and price of every point, and the ledger."""
