#!/bin/sh
# pytest.sh NAME VENV FOLDER FILE…: run tests of a suite with the plug-in NAME/ours.py; the last line is a row of the table
here=$(cd "$(dirname "$0")" && pwd)
name=$1 venv=$2
cd "$venv/suite/$3" || exit 2
shift 3
out=$(PYTHONPATH="$here:$here/$name" "$venv/bin/python" -W ignore -m pytest -c /dev/null -p ours -p no:cacheprovider -q -rsfE --tb=short \
  --disable-warnings "$@")
code=$?
printf '%s\n' "$out"
echo "| $name, tests of state | passed, failed | $(printf '%s\n' "$out" | tail -1 | tr -d '=' | sed 's/ in .*//') | | |"
exit $code
