"""Drop-ins for packages that are not developed any more: their calls, on this package and stock runtimes.

They know the public faces of this package; nothing here knows them.
"""
