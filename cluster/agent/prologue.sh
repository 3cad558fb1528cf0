# shellcheck shell=bash disable=SC2154
# Runs `prologue`, the job's shell lines (--prologue), in this shell, so that the commands after it get what they export.
# Variables: `prologue`, `prologue_log` (the file that gets their output), and the array `own`, the names of variables that
# the lines cannot change. The function `prologue_failed` gets a sentence if a line fails, and exits.
#
# There is no `set -e`, under which commands inside `module` and `conda` would end the shell: a trap is not inherited by
# functions, so only a line's own exit code counts. Nor does it count in a file that a line reads.
prologue_ended() {
    local code=$1 command=$prologue_before line text=
    [ "${#BASH_SOURCE[@]}" -le "$((prologue_depth + 1))" ] || return 0
    trap - DEBUG ERR EXIT
    exec 1>&"$prologue_stdout" 2>&"$prologue_stderr" # the line's redirections are still in force
    case $command in
    eval*prologue*) command= ;; # bash could not parse the lines
    *) command=": ${command%%$'\n'*}" ;;
    esac
    while IFS= read -r line; do text+="${text:+; }$line"; done < <(
        sed -e 's/^[[:space:]]*//' -e '/^$/d' "/proc/$$/fd/$prologue_output" | tail -n 3 | cut -b -500
    )
    prologue_failed "the prologue failed with exit code $code$command${text:+: $text}"
    exit 71
}
prologue_kept='' prologue_command='' prologue_before=''
[ ${#own[@]} = 0 ] || prologue_kept=$(declare -p "${own[@]}" 2>/dev/null)
prologue_depth=${#BASH_SOURCE[@]}
exec {prologue_stdout}>&1 {prologue_stderr}>&2
prologue_file=$(mktemp) || prologue_failed "the prologue needs a temporary file: mktemp fails"
exec {prologue_output}<> "$prologue_file"
rm -f -- "$prologue_file"
prologue_options=$-
trap : USR2
trap 'prologue_ended "$?"' EXIT
set +u
# A login shell's `module`, which /etc/profile defines. What PATH has goes before what the profile adds.
if [ "$(type -t module)" != function ] && [ -r /etc/profile ]; then
    prologue_path=$PATH prologue_umask=$(umask)
    # shellcheck disable=SC1091
    . /etc/profile 1>&"$prologue_output" 2>&1 < /dev/null
    PATH=$prologue_path:$PATH
    umask "$prologue_umask"
fi
# conda is a function of interactive shells. A line that defines it replaces this one.
[ "$(type -t conda)" = function ] || conda() {
    local hook
    hook=$(command conda shell.bash hook) || return
    unset -f conda
    eval "$hook"
    conda "$@"
}
# The line's own command, because functions do not inherit this trap, either. It also precedes the other traps.
trap 'prologue_before=$prologue_command prologue_command=$BASH_COMMAND' DEBUG
trap 'prologue_ended "$?"' ERR
eval "$prologue"$'\n:' 1>&"$prologue_output" 2>&1 < /dev/null
trap - DEBUG ERR EXIT
set +e
case $prologue_options in *u*) set -u ;; esac
sed -e 's/^/prologue: /' "/proc/$$/fd/$prologue_output" >> "$prologue_log"
IFS=$' \t\n'
exec {prologue_output}>&- {prologue_stdout}>&- {prologue_stderr}>&-
# The rest of this script tests whether a runtime has set these.
unset -v alive passed start_failure
unset -f image_id prepare prepare_exec signal_pid
eval "$prologue_kept"
