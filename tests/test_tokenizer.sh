#!/bin/sh
# SPDX-License-Identifier: MIT
# test_tokenizer.sh SOURCE BUILD: runs test_tokenizer.py by a Python that has tokenizers; status 77 if there is none.
set -eu
python=$("$1/scripts/python" tokenizers) || {
    echo "no Python here has tokenizers (scripts/setup test installs it into .venv)"
    exit 77
}
exec "$python" "$1/tests/test_tokenizer.py" "$2/vjp" "$2/tokenizers"
