# shellcheck shell=bash
# Ends what has the name $1 in Slurm: asks its batch script, and after $2 seconds Slurm, whose signals go to Apptainer's file
# systems, too, so that what runs in them hangs; prints what stays. $3 is the job's folder.
left() { squeue --noheader --user "$(id -un)" --name "$1" --Format JobID:16 | tr -d ' ' | sort -u; }
until_gone() { for _ in $(seq "$2"); do [ -n "$(left "$1")" ] || break; sleep 1; done; }
running=$(squeue --noheader --user "$(id -un)" --name "$1" --states running --Format JobID:16 | tr -d ' ')
if [ "$2" -gt 0 ] && [ -n "$running" ]; then
    # shellcheck disable=SC2086
    scancel --batch --signal=TERM $running && until_gone "$1" "$2"
fi
[ -z "$(left "$1")" ] || scancel --user "$(id -un)" --name "$1" || exit 1
until_gone "$1" 90
rm -f -- "${3%/*}/.squeue" "$3/secrets"
for job in $(left "$1"); do echo "Slurm's job $job"; done
