"""`python -m shardwise` is the `shardwise` command."""

from shardwise.cli.main import command

if __name__ == "__main__":
    command()
