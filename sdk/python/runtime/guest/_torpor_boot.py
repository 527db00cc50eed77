"""The Python half of `embedding.c`: hands calls to the SDK, and keeps the image clean.

Imported once, by `_initialize`, together with whatever most operators use: what is imported here is in the base
image that all operators share, what an operator imports itself is its own. Messages are those of the operator ABI;
whatever a function raises becomes the call's error, as `explain` tells it.
"""

# Imported for the base image only, so that operators find them there.
import _strptime  # noqa: F401  (datetime.strptime imports it at its first call)
import argparse  # noqa: F401
import ast  # noqa: F401
import asyncio
import base64  # noqa: F401
import collections.abc  # noqa: F401
import configparser  # noqa: F401
import contextlib
import contextvars  # noqa: F401
import copy  # noqa: F401
import csv  # noqa: F401
import dataclasses  # noqa: F401
import datetime  # noqa: F401
import decimal  # noqa: F401
import difflib  # noqa: F401
import email.message
import email.parser  # noqa: F401
import enum  # noqa: F401
import fnmatch  # noqa: F401
import fractions  # noqa: F401
import functools  # noqa: F401
import gc
import hashlib  # noqa: F401
import heapq  # noqa: F401
import hmac  # noqa: F401
import html  # noqa: F401
import http.client  # noqa: F401
import importlib.resources  # noqa: F401
import inspect  # noqa: F401
import io  # noqa: F401
import ipaddress  # noqa: F401
import itertools  # noqa: F401
import json  # noqa: F401
import linecache  # noqa: F401
import logging  # noqa: F401
import math  # noqa: F401
import operator  # noqa: F401
import os  # noqa: F401
import pathlib  # noqa: F401
import pprint  # noqa: F401
import random  # noqa: F401
import re  # noqa: F401
import secrets  # noqa: F401
import shlex  # noqa: F401
import statistics  # noqa: F401
import string  # noqa: F401
import struct  # noqa: F401
import sys
import textwrap  # noqa: F401
import time  # noqa: F401
import tomllib  # noqa: F401
import traceback  # noqa: F401
import types  # noqa: F401
import typing  # noqa: F401
import unicodedata  # noqa: F401
import urllib.parse
import urllib.request  # noqa: F401
import uuid  # noqa: F401
import weakref  # noqa: F401
import zipfile  # noqa: F401
import zlib  # noqa: F401
import zoneinfo  # noqa: F401

import _colorize
import _torpor_asyncio
import _torpor_warmup
from torpor_sdk import _frames
from torpor_sdk import _guest as sdk

# A host may present its log as a terminal; escape codes are no use in it.
_colorize.COLORIZE = False

asyncio.set_event_loop_policy(_torpor_asyncio.GuestEventLoopPolicy())


def load(message: bytes) -> bytes:
    kind, filename, content = _frames.decode(message, fields_min=3)[:3]
    sdk.load(kind.decode(), filename.decode(), content)
    return _frames.encode("")


def describe() -> bytes:
    return sdk.describe()


def reconcile(message: bytes) -> bytes:
    return sdk.reconcile(message)


def map(message: bytes) -> bytes:
    return sdk.map(message)


def wake() -> None:
    sdk.wake()


def settle() -> None:
    """Collect garbage, then move what is left out of the collector's sight.

    A later collection would write to the head of every object it visits, and with that make pages private that all
    instances share (4.3 MB against 0.34 MB).
    """
    flush()
    gc.collect()
    gc.freeze()


def flush() -> None:
    """An operator may have put anything in place of the streams, or closed them; its output is lost then."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def explain(exception: BaseException | None) -> bytes:
    """What escaped a call, as the text of its error."""
    if exception is None:
        return b"the call failed without an exception"
    return sdk.explain(exception).encode("utf-8", "backslashreplace")


# A test holds it to be empty.
warm_up_error = _torpor_warmup.run(sys.modules[__name__])
