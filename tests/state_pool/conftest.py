"""The pool fixture: one of each kind of storage."""

import pytest

from tests.state_pool.pools import VARIANTS


@pytest.fixture(params=VARIANTS)
def pool(request):
    return VARIANTS[request.param]()
