module kvist.dev/bench/mock

go 1.22
