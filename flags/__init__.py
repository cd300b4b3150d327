"""The version of this code: printed by --version of every program, saved in config.json and in every
checkpoint. CHANGELOG.md says what each version changed."""

VERSION = "0.11.0"
