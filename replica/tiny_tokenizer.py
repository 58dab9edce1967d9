"""The tokenizer and chat template of the model `tiny`, built from the word list below. No torch, no files, no network.

A byte-level BPE: any text round-trips. Its merges are learned here, in integers and with every tie broken by the
spelling of the pair, so all processes on all machines build the same bytes; a fleet's keys depend on that.

    ids    [ special tokens | 256 bytes | merges, in the order they were learned ]

Each word of the list is, with a space before it, one token. Text made of such tokens alone is tokenized back to the
same ids (`word_token_ids`), which is how the answers of `tiny` stay in the prefix cache from one turn to the next.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import pairwise

from shared.tokenizer_bundle import TokenizerBundle

__all__ = ["BEGIN", "END", "SPECIAL_TOKENS", "tiny_bundle", "vocabulary", "word_token_ids"]

BEGIN = "<|begin|>"
END = "<|end|>"
SPECIAL_TOKENS = (BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")

# A turn is `<|role|>text<|end|>`, and nothing looks ahead or back: a longer conversation only appends.
CHAT_TEMPLATE = """
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is not none and content is defined -%}
{%- for part in content -%}
{%- if part.type == 'text' -%}{{ part.text }}
{%- else -%}{{ raise_exception("This model reads text only; a content part has type '" ~ part.type ~ "'.") }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- if tools -%}
{{- '<|system|>Tools:' -}}
{%- for tool in tools -%}
{{- '\\n' ~ (tool | tojson) -}}
{%- endfor -%}
{{- eos_token -}}
{%- endif -%}
{%- for message in messages -%}
{%- set role = 'system' if message.role == 'developer' else message.role -%}
{%- if role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception("Message role must be system, developer, user, assistant or tool, not '" ~ role ~ "'.") -}}
{%- endif -%}
{{- '<|' ~ role ~ '|>' -}}
{{- text_of(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n' ~ (call.function | tojson) -}}
{%- endfor -%}
{{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""

# The more frequent a word, the earlier it stands.
_WORDS = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so up said what its about than
into them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many off before must well back through years where much your way down should because long
each just state those people too how little good world make very year still see own work men day get here old life
both between being under three never know same last another while us might great go come since against right came take
used himself few house use place during high without again home around small however found part school once general
upon say every does got united left number course war until always away something fact water though less public put
think almost hand enough far took head yet government system set better told nothing night end why called find going
look asked later point knew next city program business give group toward days young let room word president side
social given present several order national second possible rather per face among form important often things looked
early white case large need big four within felt along children saw best church ever least power development light
thing family interest want members mind country area others done turned although open god service certain kind problem
began different door thus help means sense whole matter line question name human company whether money local show
story information answer result model data user tool message token prompt cache block prefix request response server
router replica engine fleet batch step queue load memory key value table list index text code file function class
method object string integer error test check run build start stop read write send receive close add remove update
create delete search return follow please explain describe compare summarize translate following example context
document passage evidence review report note detail section chapter paragraph sentence page title author source
reference figure version release customer price product market support ticket account invoice payment policy refund
delivery address contact research study theory experiment measure sample analysis conclusion paper journal science
network packet client process thread storage disk device driver kernel command shell script terminal learning training
inference attention layer weight vector matrix tensor gradient loss accuracy language yes thanks hello sorry welcome
sure correct wrong true false none null maybe perhaps exactly certainly able accept access across action active
actually agree air allow alone already amount animal appear apply approach arm art article ask attack avoid bad bank
bar base basic bed begin behind believe below beside beyond bit black blue board boat body book born box boy bring
brother brown building burn buy call camera car card care carry cast cat catch cause cell center central century chair
chance change character charge child choice choose circle citizen civil claim clear climb clock cloth cloud coast cold
collect college color common community complete computer concern condition consider contain continue control cook cool
copy corner cost count couple court cover cross crowd cry culture cup current cut dark date daughter dead deal death
decade decide decision deep degree demand design despite determine difference difficult dinner direct direction
director discover discuss disease distance doctor dog dream dress drink drive drop dry due earth east easy eat
economic edge education effect effort egg eight either election employee energy enjoy enter entire environment
especially establish evening event exist expect experience expert eye factor fail fair fall famous fast father fear
feel field fight fill film final finally financial fine finger finish fire firm fish five floor flow flower fly focus
food foot force foreign forest forget former forward free fresh friend front fruit full fund future game garden gas
generation girl glass goal gold grass gray green ground grow growth guess gun hair half hang happen happy hard hat
health hear heart heat heavy hill history hit hold hole hope horse hospital hot hotel hour hundred husband ice idea
identify image imagine impact improve include increase indeed indicate individual industry inside instead institution
international interview investment involve island issue item job join keep kill king kitchen knowledge lady lake land
late laugh law lawyer lay lead leader learn leave leg legal letter level lie limit lip listen live loan lock lose lot
love low machine main maintain major majority manage management manager mark marriage material meal mean medical meet
meeting member mention metal middle mile military milk million minute miss mission modern moment month moon morning
mother mountain mouth move movement movie music myself narrow nation natural nature near nearly necessary neck news
newspaper nice nine nobody noise north nose nor nurse ocean offer office officer oil okay operation opportunity option
orange organization original outside owner pain paint pair parent park particular partner party pass past path patient
pattern pay peace performance period person phone physical pick picture piece plan plane plant play player pole police
political poor popular population position positive pour practice prepare pressure pretty prevent print prison private
probably produce production professional professor project property protect prove provide pull purpose push quality
quick quickly quiet quite race radio rain raise range rate reach ready real reality realize really reason recent
recognize record red reduce reflect region relate relationship religious remain remember repeat represent require rest
reveal rice rich ride ring rise risk river road rock role roll roof round rule safe sail salt sand save scale scene
season seat secret security seek seem sell senior separate series serious serve seven shake shape share sharp ship
shoot shop short shot shoulder shout sign significant silver similar simple simply sing single sister sit site
situation six size skill skin sky sleep slow smell smile smoke snow society soft soil soldier solve son song soon sort
sound south space speak special specific speech speed spend spirit split spoke sport spread spring square staff stage
stand standard star statement station stay steel stick stone store storm straight strange strategy stream street
strong structure student subject succeed success suddenly suffer sugar suggest suit summer sun supper suppose surface
surprise sweet swim talk task tax teach teacher team technology television ten tend term thank themselves third
thought thousand threat throw tie tiny today together tomorrow tone tonight top total touch tour town trade tradition
traffic train travel treat treatment tree trial trip trouble truck trust truth try turn twelve twenty type uncle
understand unit usual valley various view village visit voice vote wait walk wall wash watch wave wear weather week
weigh west wheel wide wife wild win wind window wine wing winter wish woman women wonder wood worker worry worth yard
yellow yesterday yourself zero
"""

# Spellings that stand without a space before them: capitals, endings, code, runs of white space.
_FRAGMENTS = """
The This That What How Why When Where Who Which You It In If We He She They There Please Can Could Would Should Do
Does Is Are And But For From To With Write Explain Describe Compare Summarize List Give Tell Question Answer Context
System User Assistant Tool Document Section Note Yes No Hello ing ed er est ly ion tion ation ment ness able ible ous
ive ful less ity ies al ial ure ance ence ism ist ize ise ship un re pre con com dis ex inter trans sub over under 's
't 're 've 'll 'm 'd def class return import from self None True False for while if elif else try except finally with
as lambda yield async await raise pass print len range str int float list dict tuple set isinstance super __ init main
__(): function const let var new null undefined void public private static struct enum impl fn pub use mod match type
interface package func main include define template typename namespace select where insert into values update delete
http https www com org html json xml yaml utf ascii get post put content role id name value key index data error
status result == != <= >= -> => += -= && || :: // /* */ ## ### ``` "" '' () [] {} (): ); }, ], ", ": ... --- === ___
00 10 19 20 01 100 000 200 2024 2025 2026
"""
_WHITESPACE = ("\n\n", "\n" * 3, "\n" * 4, *(" " * width for width in (2, 3, 4, 7, 8, 11, 12, 15, 16)), "\t\t")


@cache
def vocabulary() -> dict[str, int]:
    """Token (spelled in the byte alphabet) -> id."""
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for token in (*_byte_alphabet(), *(left + right for left, right in _merges())):
        ids.setdefault(token, len(ids))
    return ids


def word_token_ids() -> list[int]:
    """The ids of ` word` for every word of the list, ascending: any row of them, as text, has exactly these tokens."""
    ids = vocabulary()
    return sorted({ids[_spell(" " + word)] for word in _WORDS.split()})


@cache
def tiny_bundle() -> TokenizerBundle:
    """The same bytes in every process."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
            for index, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary(),
            "merges": [[left, right] for left, right in _merges()],
        },
    }
    return TokenizerBundle(
        tokenizer_json=json.dumps(tokenizer, separators=(",", ":")).encode(),
        special_tokens={"bos_token": BEGIN, "eos_token": END},
        chat_template=CHAT_TEMPLATE,
    )


@cache
def _merges() -> tuple[tuple[str, str], ...]:
    """BPE training to the end: the heaviest pair is merged (among equals the first by spelling) until none is left."""
    words = list(_weighted_spellings().items())
    pieces = [list(spelling) for spelling, _ in words]
    weights: Counter[tuple[str, str]] = Counter()
    containing: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for index, (_, weight) in enumerate(words):
        for pair in pairwise(pieces[index]):
            weights[pair] += weight
            containing[pair].add(index)
    heap = [(-weight, pair) for pair, weight in weights.items()]  # an entry whose weight has changed since is stale
    heapify(heap)
    merges = []
    while heap:
        weight, best = heappop(heap)
        if weights[best] != -weight or weight == 0:
            continue
        merges.append(best)
        changed = set()
        for index in containing.pop(best):
            for sign in (-1, 1):
                for pair in pairwise(pieces[index]):
                    weights[pair] += sign * words[index][1]
                    changed.add(pair)
                    if sign > 0:
                        containing[pair].add(index)
                if sign < 0:
                    pieces[index] = _merge(pieces[index], best)
        for pair in changed:
            heappush(heap, (-weights[pair], pair))
    return tuple(merges)


def _merge(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def _weighted_spellings() -> dict[str, int]:
    """What to learn from, each with its share of running text: words by Zipf's law, the rest by a flat weight."""
    weighted: Counter[str] = Counter()
    for rank, word in enumerate(dict.fromkeys(_WORDS.split())):
        weighted[_spell(" " + word)] += 1_000_000 // (rank + 20)
    for fragment in (*_FRAGMENTS.split(), *_WHITESPACE):
        weighted[_spell(fragment)] += 1_000
    return weighted


def _spell(text: str) -> str:
    """`text` in the alphabet that byte-level BPE writes its tokens in: one printable character per byte of UTF-8."""
    alphabet = _byte_alphabet()
    return "".join(alphabet[byte] for byte in text.encode())


@cache
def _byte_alphabet() -> tuple[str, ...]:
    """A byte that prints stands for itself; the n-th that does not is the n-th character after U+00FF."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))
