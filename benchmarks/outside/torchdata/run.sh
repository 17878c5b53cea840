#!/bin/sh
exec sh "$(dirname "$0")/../pytest.sh" torchdata "$1" test/stateful_dataloader test_state_dict.py test_sampler.py test_hugging_face.py
