from fake_plugins import fake_plugin  # noqa: F401
