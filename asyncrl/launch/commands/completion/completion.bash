_asyncrl() {
    local line=${COMP_LINE:0:COMP_POINT} words=() skip=1 cut=""
    read -r -a words <<<"$line"
    local current=""
    if [[ $line != *[[:space:]] ]]; then
        current=${words[${#words[@]}-1]}
        words=("${words[@]:0:${#words[@]}-1}")
    fi
    if [[ ${words[0]} != *asyncrl ]]; then # python -m asyncrl.launch ...
        [[ ${words[1]} == -m && ${words[2]} == asyncrl.launch ]] || return 0
        skip=3
    fi
    local found
    found=$(_asyncrl_complete "$current" "${words[@]:skip}")
    [[ $current == *=* && $COMP_WORDBREAKS == *=* ]] && cut=${current%%=*}= # bash completes what is behind the = alone
    local each
    COMPREPLY=()
    while IFS= read -r each; do
        [ -n "$each" ] && COMPREPLY+=("${each#"$cut"}")
    done <<<"$found"
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null # only in a completion
    return 0
}

complete -o default -F _asyncrl asyncrl python python3
