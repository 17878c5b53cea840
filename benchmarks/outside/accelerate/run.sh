#!/bin/sh
exec sh "$(dirname "$0")/../pytest.sh" accelerate "$1" tests test_data_loader.py
