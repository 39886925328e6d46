"""Saving and loading a run: JSON manifest and safetensors files, committed by one rename, read under any layout."""

from engine.checkpoint.boxes import Box, flat_range_boxes, intersect
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.exchange import Exchange
from engine.checkpoint.export import export, get_fp32_state_dict
from engine.checkpoint.folder import default_tag, list_tags
from engine.checkpoint.loading import LoadedTensors, load_client_state, load_tensors, verify_files
from engine.checkpoint.manifest import Manifest
from engine.checkpoint.manifest_reader import read_manifest
from engine.checkpoint.reader import CheckpointReader, open_checkpoint
from engine.checkpoint.report import describe
from engine.checkpoint.retention import Retention, prune
from engine.checkpoint.saving import TagValidation, save

__all__ = [
    "Box",
    "CheckpointError",
    "CheckpointReader",
    "Exchange",
    "LoadedTensors",
    "Manifest",
    "Retention",
    "TagValidation",
    "default_tag",
    "describe",
    "export",
    "flat_range_boxes",
    "get_fp32_state_dict",
    "intersect",
    "list_tags",
    "load_client_state",
    "load_tensors",
    "open_checkpoint",
    "prune",
    "read_manifest",
    "save",
    "verify_files",
]
