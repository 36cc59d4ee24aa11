"""Whether afterdrop controls a given model: the tests of this package, on a user's own module."""

from afterdrop.conformance.model_check import check as check
from afterdrop.conformance.verdicts import Check as Check
from afterdrop.conformance.verdicts import Verdict as Verdict
