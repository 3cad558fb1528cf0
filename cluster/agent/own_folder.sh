# shellcheck shell=bash
# Prints the folder of the user $2 (a UID) in $1, a folder beside the jobs' run directories that all users of these share,
# and makes it. What is in it is run or believed by later jobs (packages, compiled code, answers of squeue), so it must be
# this user's, and closed to what others write. Otherwise prints why, and fails. $3 is a file that this
# user has just made there: NFS may give it another owner.
own_folder() {
    local folder=$1/$2 owner who mode kind why hint
    # Who may make a job's folder may also make a folder in $1, but not remove another user's. In a container, the user may
    # lack the group by which they reach it.
    if [ ! -d "$1" ] && mkdir -p -- "$1"; then
        chgrp --reference="${1%/*}" -- "$1"
        chmod --reference="${1%/*}" -- "$1" && chmod a+x,+t -- "$1"
    fi 2>/dev/null
    if ! why=$(LC_ALL=C mkdir -m 700 -- "$folder" 2>&1) && [ ! -e "$folder" ]; then
        case $why in
            *"Permission denied")
                why=$(stat -c '%n belongs to %U and has the mode %a' -- "$1")
                why+="; its owner can type: chmod 1777 $1" ;;
            *) why=${why##*: } ;;
        esac
        echo "cannot make the folder $folder: $why"
        return 1
    fi
    owner=$([ -n "${3:-}" ] && stat -c %u -- "$3" 2>/dev/null) || owner=$(id -u)
    read -r who mode kind <<< "$(stat -c '%u %a %F' -- "$folder" 2>/dev/null)"
    case $who:$kind:$mode in
        "$owner:directory:"*700) echo "$folder" ;;
        "$owner:directory:"*[0145][0145]) chmod 700 -- "$folder" && echo "$folder" ;; # of a container that was started by hand
        *)
            hint="jobs run what is in it, so it must be a folder of this user with the mode 700"
            echo "$folder is a $kind of $(stat -c %U -- "$folder") with the mode $mode, but $hint: remove it"
            return 1 ;;
    esac
}
