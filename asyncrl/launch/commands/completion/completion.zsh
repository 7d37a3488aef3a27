_asyncrl() {
    local skip=1
    if [[ $words[1] != *asyncrl ]]; then
        if [[ $words[2] != -m || $words[3] != asyncrl.launch || $CURRENT -lt 4 ]]; then
            if (( $+functions[_python] )); then _python; else _default; fi
            return
        fi
        skip=3
    fi
    if [[ $words[CURRENT-1] == --config-dir ]]; then
        _files -/
        return
    fi
    local -a before found
    before=("${(@)words[skip+1,CURRENT-1]}")
    found=(${(f)"$(emulate -L sh; _asyncrl_complete "$PREFIX" "${before[@]}")"})
    if [[ $PREFIX == *=* ]]; then
        compset -P '*='
        compadd -- ${found#*=}
        _files
        return
    fi
    compadd -S '' -- ${(M)found:#*=} # a value follows
    compadd -- ${found:#*=}
}

(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
autoload -Uz bashcompinit && bashcompinit # compgen
compdef _asyncrl asyncrl python python3
