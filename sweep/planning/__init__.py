"""The plan: each point's verdict, prediction and price, and the ledger."""
