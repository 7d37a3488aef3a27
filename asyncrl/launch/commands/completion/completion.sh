# Completion of asyncrl's command line, made by `python -m asyncrl.launch completion`.

_asyncrl_options() {
    case $$1 in
$options
    esac
}

_asyncrl_choices() {
    case $$1 in
$choices
    esac
}

_asyncrl_experiments() { # the built-in ones, and those of the folder $$1
    echo "$experiments"
    local file
    for file in $${1:+"$$1"/*.yaml}; do
        file=$${file##*/}
        echo "$${file%.yaml}"
    done
}

_asyncrl_complete() { # $$1: the current word; then those before it, behind the program's name
    local current=$$1 first="" second="" folder="" word before=""
    shift
    for word in "$$@"; do
        if [ "$$before" = --config-dir ]; then
            folder=$$word
        elif [ "$${word#-}" = "$$word" ]; then
            if [ -z "$$first" ]; then first=$$word; elif [ -z "$$second" ]; then second=$$word; fi
        fi
        before=$$word
    done
    if [ "$$before" = --config-dir ]; then
        compgen -d -- "$$current"
        return
    fi
    local command="" experiment=$$first
    if [[ -n $$first && " $commands " == *" $$first "* ]]; then
        command=$$first experiment=""
        [[ " $of_experiments " == *" $$command "* ]] && experiment=$$second
    fi
    case $$current in
    -*)
        if [ -n "$$command" ]; then compgen -W "$$(_asyncrl_options "$$command")" -- "$$current"
        else compgen -W "$launch_options" -- "$$current"; fi
        ;;
    *=*)
        compgen -W "$$(_asyncrl_choices "$${current%%=*}")" -P "$${current%%=*}=" -- "$${current#*=}"
        compgen -f -P "$${current%%=*}=" -- "$${current#*=}"
        ;;
    *)
        if [ -z "$$first" ]; then
            compgen -W "$commands $$(_asyncrl_experiments "$$folder")" -- "$$current"
        elif [[ $$command == completion ]]; then
            compgen -W "bash zsh" -- "$$current"
        elif [[ -n $$command && -z $$experiment ]]; then
            [[ " $of_experiments " == *" $$command "* ]] && compgen -W "$$(_asyncrl_experiments "$$folder")" -- "$$current"
            compgen -f -- "$$current"
        elif [[ " $supervised " == *" $$experiment "* ]]; then
            compgen -S = -W "$supervised_settings" -- "$$current"
        else
            compgen -S = -W "$settings" -- "$$current"
        fi
        ;;
    esac
}
