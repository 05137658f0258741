"""Data: class tables, scenes, sampling, transforms and the datamodule.

Entry: `seg4k.data.build.build_datamodule`. Nothing heavy is imported here.
"""
