#!/bin/sh
# SPDX-License-Identifier: MIT
# test_transformers.sh SOURCE BUILD: runs test_transformers.py, test_families.py and, where PEFT is there, test_lora.py by a Python that has
# torch and transformers; status 77 if there is none.
set -eu
python=$("$1/scripts/python" torch transformers) || {
    echo "no Python here has torch and transformers (scripts/setup test installs them into .venv)"
    exit 77
}
"$python" "$1/tests/test_transformers.py" "$2"
"$python" "$1/tests/test_families.py" "$2"
"$python" "$1/tests/test_lora.py" "$2" || { status=$?; [ $status -eq 77 ] || exit $status; }
