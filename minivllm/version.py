"""The two versions that other people pin: the package's, and the plugin interface's."""

__version__ = "0.1.0"

# Raised when a hook or an exported interface changes in a way that breaks a plugin written for the number before.
API_VERSION = 1
