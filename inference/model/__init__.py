"""The models: layers, weights, the cache and its steps; independent of ranks and sampling."""
