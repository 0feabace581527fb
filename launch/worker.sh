#!/usr/bin/env bash
# One worker, told everything by environment variables: what containers and rented machines start.
#
#   ECHO2_TICKET               the ticket, or @FILE that holds it
#   ECHO2_PRICE_USD_PER_HOUR   what this machine costs (0)
#   ECHO2_MACHINE              the name by which a run rented it (`rent` of fleet.offers)
#   ECHO2_LISTEN               HOST:PORT that other workers may dial (any port)
#   ECHO2_ADVERTISE            where they dial it, if that differs
#   ECHO2_STATE                directory that outlives the container, so that it comes back as the same worker
#   ECHO2_WORKER_ARGS          more arguments of `echo2 worker`
#
# SIGTERM: leases go back, status 0.
set -euo pipefail
: "${ECHO2_TICKET:?set it to a ticket of the run: echo2 invite DIR}"
arguments=(--price-usd-per-hour "${ECHO2_PRICE_USD_PER_HOUR:-0}")
[ -z "${ECHO2_MACHINE:-}" ] || arguments+=(--offer "$ECHO2_MACHINE")
[ -z "${ECHO2_LISTEN:-}" ] || arguments+=(--listen "$ECHO2_LISTEN")
[ -z "${ECHO2_ADVERTISE:-}" ] || arguments+=(--advertise "$ECHO2_ADVERTISE")
[ -z "${ECHO2_STATE:-}" ] || arguments+=(--state "$ECHO2_STATE")
# shellcheck disable=SC2086  # words of one variable are arguments of their own
exec echo2 worker "$ECHO2_TICKET" "${arguments[@]}" ${ECHO2_WORKER_ARGS:-}
