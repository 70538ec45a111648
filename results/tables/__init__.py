"""The Parquet tables: their schema, how they are written, merged, read, upgraded and exported."""
