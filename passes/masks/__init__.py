"""Reading and proving attention masks."""
