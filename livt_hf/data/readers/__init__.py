"""Readers: a folder, table, list, parquet or arrow file, webdataset or Hub dataset -> one `ImageTable` per split."""
