"""What lives between two calls: page pools, page tables, handles, and the executable that a compile returns."""
