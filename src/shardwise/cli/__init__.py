"""The command line. Environment and configuration files are read here and nowhere below."""
