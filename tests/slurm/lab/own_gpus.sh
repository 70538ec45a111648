# Sourced in a node's mount namespace.

# own_gpus FOLDER INDEX...: a /dev with only these NVIDIA devices (/dev/nvidiaINDEX), and all else of the machine's.
# FOLDER is where it is put together. The driver's libraries make missing devices anew for root, unless its parameters
# forbid it.
own_gpus() {
  local new=$1 entry name index
  shift
  mkdir -p "$new" && mount -t tmpfs -o mode=755 none "$new" || return 1
  for entry in /dev/*; do
    name=${entry##*/}
    case $name in
      nvidia[0-9]*)
        index=${name#nvidia}
        case " $* " in *" $index "*) ;; *) continue ;; esac ;;
    esac
    if [ -L "$entry" ]; then
      cp -P "$entry" "$new/$name"
    elif [ -d "$entry" ]; then
      mkdir "$new/$name" && mount --rbind "$entry" "$new/$name" || return 1
    else
      touch "$new/$name" && mount --bind "$entry" "$new/$name" || return 1
    fi
  done
  mount --move "$new" /dev || return 1
  entry=/proc/driver/nvidia/params
  [ -e "$entry" ] || return 0
  sed 's/^ModifyDeviceFiles: 1/ModifyDeviceFiles: 0/' "$entry" >"$new.params" && mount --bind "$new.params" "$entry"
}
