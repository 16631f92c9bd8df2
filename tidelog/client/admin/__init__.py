"""The admin client, one module for each kind of resource."""
