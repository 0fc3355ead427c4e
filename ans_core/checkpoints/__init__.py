"""Files <-> models: our folder, upstream's layouts, training states, published bases, adapters."""
