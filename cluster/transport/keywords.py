"""What each keyword of ssh_config means for a login: one table. Pure data.

A keyword matters if its value in `ssh -G` is not OpenSSH's default. Those of WITHOUT_SSH need no ssh program, for the
reason given there. All others do, including those of an OpenSSH that is newer than this table.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

#: Variables that do not matter for a login: the locale and colours.
_LOCALE = ("LANG", "LANGUAGE", "LC_*", "XMODIFIERS", "COLORTERM", "NO_COLOR")

#: The keywords that need no ssh program, by the reason.
_REASONS = {
    "fabric follows it": """hostname user port hostkeyalias userknownhostsfile globalknownhostsfile identityfile
        identitiesonly proxyjump ciphers macs kexalgorithms hostkeyalgorithms pubkeyacceptedalgorithms""",
    "fabric then uses no RSA key": "requiredrsasize rsaminsize",
    "fabric only knows publickey, which must be listed": "preferredauthentications",
    "ssh tries it when fabric cannot log in": "gssapiauthentication",
    "`ssh -G` has evaluated it": """host match include tag ignoreunknown canonicalizehostname canonicaldomains
        canonicalizefallbacklocal canonicalizemaxdots canonicalizepermittedcnames""",
    "an open ControlMaster counts, not the keyword": "controlmaster controlpath controlpersist",
    "the locale does not matter for a login; other variables do": "sendenv",
    "jobs outlive the connection, so they cannot use an agent of this machine": "forwardagent",
    "no connection of clusterctl forwards anything": """localforward remoteforward dynamicforward clearallforwardings
        exitonforwardfailure gatewayports permitremoteopen streamlocalbindmask streamlocalbindunlink tunnel tunneldevice
        forwardx11 forwardx11timeout forwardx11trusted xauthlocation""",
    "clusterctl answers no prompts": """batchmode passwordauthentication kbdinteractiveauthentication
        kbdinteractivedevices numberofpasswordprompts""",
    "clusterctl sets it for every ssh": """remotecommand requesttty sessiontype stdinnull forkafterauthentication
        serveraliveinterval serveralivecountmax loglevel""",
    "it only matters at a terminal": "escapechar enableescapecommandline",
    "it changes messages": "logverbose syslogfacility fingerprinthash visualhostkey warnweakcrypto",
    "it takes effect after the login": "localcommand permitlocalcommand addkeystoagent hashknownhosts updatehostkeys",
    "it has no effect without a keyword that needs the ssh program": """enablesshkeysign hostbasedacceptedalgorithms
        casignaturealgorithms""",
    "it has no effect unless ssh uses GSSAPI": """gssapiclientidentity gssapidelegatecredentials gssapikexalgorithms
        gssapirenewalforcesrekey gssapiserveridentity gssapitrustdns""",
    "it changes traffic, not the login": "compression ipqos rekeylimit obscurekeystroketiming tcpkeepalive",
}
WITHOUT_SSH = {keyword: reason for reason, listed in _REASONS.items() for keyword in listed.split()}

#: Keywords that are not followed, and the sentence that says so.
UNSUPPORTED: dict[str, str] = {
    "stricthostkeychecking": "clusterctl only logs in if the host key is known, whatever StrictHostKeyChecking says",
    "nohostauthenticationforlocalhost": "clusterctl also checks host keys on localhost",
    "connecttimeout": "clusterctl waits 8 seconds for a connection, whatever ConnectTimeout says",
}
#: The values of such keywords with which ssh would accept an unknown host key.
RELAXED = {
    "stricthostkeychecking": ("accept-new", "false", "no", "off"),
    "nohostauthenticationforlocalhost": ("yes",),
}

#: Keywords that can need the ssh program, as the manual writes them; only messages use this.
NAMES = """
AddressFamily BindAddress BindInterface CertificateFile ChannelTimeout CheckHostIP ConnectionAttempts
GlobalKnownHostsFile GSSAPIKeyExchange HostbasedAuthentication IdentityAgent IdentityFile KnownHostsCommand
PKCS11Provider PreferredAuthentications ProxyCommand ProxyUseFdpass PubkeyAuthentication RefuseConnection
RevokedHostKeys SecurityKeyProvider SendEnv SetEnv UserKnownHostsFile VerifyHostKeyDNS VersionAddendum
"""
_NAME = {name.lower(): name for name in NAMES.split()}


def _has_tokens(values: Sequence[str]) -> bool:
    return any("%" in value or "${" in value for value in values)


#: Keywords of WITHOUT_SSH whose values decide.
_NEEDS_SSH: dict[str, Callable[[Sequence[str]], bool]] = {
    "identityfile": _has_tokens,
    "userknownhostsfile": _has_tokens,
    "globalknownhostsfile": _has_tokens,
    "preferredauthentications": lambda values: "publickey" not in values[0].split(","),
    "sendenv": lambda values: any(
        not any(fnmatchcase(value, pattern) for pattern in _LOCALE) for value in values
    ),
}


def name(keyword: str) -> str:
    """Return the keyword as the manual writes it; `ssh -G` prints lower case."""
    return _NAME.get(keyword, keyword)


def needs_ssh(keyword: str, values: Sequence[str]) -> bool:
    """Return whether a keyword with these values, which are not the defaults, needs the ssh program."""
    if keyword in WITHOUT_SSH:
        return keyword in _NEEDS_SSH and _NEEDS_SSH[keyword](values)
    return keyword not in UNSUPPORTED
