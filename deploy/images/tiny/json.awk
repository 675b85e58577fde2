# SPDX-License-Identifier: Apache-2.0
# Prints each value of a JSON text as ".path.to.it<TAB>value"; strings keep their escapes.
{ text = text $0 "\n" }
END { at = 1; value("") }

function blank() { while (substr(text, at, 1) ~ /[ \t\r\n,:]/ && at <= length(text)) at++ }

function string(  start) {
    start = ++at
    while (substr(text, at, 1) != "\"" && at <= length(text)) at += substr(text, at, 1) == "\\" ? 2 : 1
    return substr(text, start, at++ - start)
}

function value(path,  first, key, number) {
    blank()
    first = substr(text, at, 1)
    if (first == "{" || first == "[") {
        at++
        for (blank(); substr(text, at, 1) !~ /[]}]/ && at <= length(text); blank()) {
            key = first == "{" ? string() : number++
            value(path "." key)
        }
        at++
    } else if (first == "\"") {
        print path "\t" string()
    } else {
        number = at
        while (substr(text, at, 1) ~ /[-+.0-9a-zA-Z]/ && at <= length(text)) at++
        print path "\t" substr(text, number, at - number)
        if (at == number) at++
    }
}
