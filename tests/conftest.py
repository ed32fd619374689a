from poison import poison_fresh_memory

poison_fresh_memory()
