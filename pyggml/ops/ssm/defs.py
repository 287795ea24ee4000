"""The ssm ops."""
