"""A file per command of `fdfo`: `add_arguments(parser)` gives it flags and help, `main(arguments)` runs it.

`fdfo_client.cli` lists them and imports only the one that was asked for.
"""
