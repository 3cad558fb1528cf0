# shellcheck shell=bash
# A function of the scripts that report facts: it prints the fact $1 with the value $2 as a line `NAME=VALUE`.
fact() { printf '%s=%s\n' "$1" "${2//$'\n'/ }"; }
