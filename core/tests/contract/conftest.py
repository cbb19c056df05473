from installed_plugins import install as install
