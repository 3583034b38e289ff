"""The models: shapes, layers and the cache they are handed; nothing about ranks or sampling."""
