"""Drop-ins for packages that are not developed any more: their calls, on this package and stock runtimes."""
