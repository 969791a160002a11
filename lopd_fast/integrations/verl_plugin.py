"""Importing this registers the loss modes. VERL_USE_EXTERNAL_MODULES names modules that verl imports everywhere."""

from lopd_fast.integrations.verl import register

register()
