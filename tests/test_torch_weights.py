"""The restricted reader of PyTorch files: what it reads, and what it refuses."""

import base64
import io
import os
import pickle
import struct
import sys
import types
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from captioner.errors import InputError
from captioner.torch_weights import read_state_dict

# Written by PyTorch 2.13.0 with `torch.save`, both layouts, from one state dict:
#     state = torch.nn.Linear(3, 2, bias=False).state_dict()      weight = arange(6), (2, 3)
#     base = torch.arange(10, dtype=torch.float64)
#     transposed = torch.arange(6, dtype=torch.int32).reshape(2, 3).t()
#     slice = base[3:8:2], same_storage = base[1:3], and the others as in EXPECTED.
# Then zlib.compress and base64.b85encode.
ZIP_FILE = """
c-p0wPi)&%9LHbcCQU=vKigQlGRheLQr4#V?{sUI%oMZXv8CCDtX?7~aT^Oa?k|3AHKa+EwiN9)kT@Yt96=m8a6>zDLm(t14oD
m(PH=?Nc+YlHzt?}XeX9G~#NW^NYy16v&m~3ZK`0VIJH`+?iL_R&VXW)Zbq#Cr)sIYB8bFK8*bLTcmTBrWY*<Y@daG5}TY7!os
NpD}i82IYYM8(_bYr=JAy~r}LB=a<*f8yArKMNb46|OrdegRAmGx8<gjh`NB?_CIsV(c!<4U5kX=(Vj`(YG9YJi-RfUqi%xwg6
ny-FBEWI;hnP!YDEPZ5;B7DOL4Xo?pw^q1j;8YL&=me#aaEnBa{K!dn7Iu6&H+x$U?pM;@?!yTqvK?!cbNhLt>r(Eu73@?`9j2
fbWO{1p62!our)~cr7rH(q(6r3g0D2A~G!W7!@k`ipgIhXh{hVe4IqV`jwwxU-$_u;$?Zj3fO^{Wdc3K3pV0&RHBRlknmjWWFH
+;Y37nOY0pVglW;n#<idF(*zMCI~Qq;caq}6B91zB8JH_OsQmTpoV5HL7c%{BOi4!(+(yB34#e?NIK7;4Jn!{?cy>RvSrArbeU
C`=#xz5KxB}T?0($E<{fMnW?bwg4||znXI<<ZhAU+#IJbYv)Rt{1vP{b|yS%FoF9#Cg2^ijS9%&oqDeqmECu4Z84A&f<zOst%!
FBJhyX#Ga_lX!`P^cIwp)I(fgy=f^zy;jIaH|ZZwfnH3_7Op4MaLQ~9w<BC-&Sd5!JYeX*IDH2ddntt10N~@+qSFmlF}Q|J~0M
wl2uKQ(w@~hf~LCF8DFwmD;lnNG+CP9igcfmq?X_P_1gn_ee~Gdatw*vmfo_gXr{5;T+y3YmeT*<b$jG8G(cek{tOa};JyKdQK
1{4dJpRsZ8oxW`6#}fVHy~lI?d3Y`{OLFoAACF2GA9zD^4e5>C!O*xYW%8`Bfx8<k%#~mqnUr<ngmlN68nX2PB$g6D4ISh7RK&
@a{ZqrL^Efj$dzN?w|hl5&Tn!_1_+U7rZ};?iBInA#XnI&7<CY&YRDB^9AR={feq`iDo_^cZSWKmZij@pX9&K-9df7_~qg=Y7{
xZcb4_d$Ws2uD+uM$Q|kTjYxQxD_x$$rF0$TPS(-gg`7AyyY<^GuH$JahNAS-b*FS&))c)HC4<8BM5_av;uJ%`1dr_9=j%B~N_
q7h9Q(d!eXCCC;(oq`!$0y5o5AJ{CD7D>yo&2`mGDrvhSfg)W6{9Xo@k3rtBA?3Ta~V-gXLE^6RusiVA|dAT*<?DIO{TKRd@eP
UpAl)w{PQ0QF_I(ZqznX|3iWdOcdelv$@%w4UhUt2Mi}K20qwQV@euzeGRAHkJ!qeui|6<^f?<a9nUB-mfOxsTYY#B;Ga<z79l
X}xaarwGyf(>e{augM#=@L7#cTbYi`D+lYty{e-+5RqeZ^rr9k2Cw4OaUzug&sWf624jI}uKs>u7gx3jXmEuN8S;f2|HO+F~E#
E1nnoOK6;3TR!pb#a&Xu;mJ-b5T<rqKxeiE&nxQAL`UB>(KjdD|J}E|P}tQBIOn_P{s#dx6|n
"""
LEGACY_FILE = """
c-n20OK;Oa5Xb#U($*9xP@shZ<(={<PMV|%uLLNiU|Oho`GO+X*~Uh0oUu1WMT(S5BH%M{;K-*yd>w9Fk&s~4>!c0x%IisHcYp
u!&g^!i&x-r!%kuBpci)~*&v&HNpEADNAf$~6K@gh0M?K4PtJ}m69IpW)PB8Z4i0e@5k}7G`9J2w^M?*m;-D#3);Cvtf$ZbfZj
U+k)+w&<THOY|ipVOd_(h^33F}y|{Mzln$g_;)1xWuBU5-8978u3YO$+4&c!ki9b+DPGw_r$5&6eNp!zGcr>Thws_rRtN7mgCl
{lr#d*uWn}*kke^ngsJ09vrZtvmnh4wXVMqksX)>=fOAT@TsET?)l$AxEEXXZ25L217+Y$M!sxmtXp$!PU`&%Wu?Na0o5i$`!n
h9m`Iq}<BWQX7slfpowe7y%<HoMq!M$pkOrfZ%Doog1<q%VmHK_-OHIa!O;VP39j_PoXZ>8&41db00EP1UBmkczfhQFwwstZ||
MhyiuPOPJX+=Y{x)P)(&KSklR4rh#U#y7Vxf6<Q3av3|8cs3%QTgPA#c3u;^aDfvqQn;kU<uGA^WxA#h>7kIHV%`S<&;7S4rQB
i`t{`4S{8ikPxjBx#M&Y^+^I_%Krn?C@hM+6x8bH-y=z^NVm@^2K5Sk71*@XobbB@FF6bd>l8l$*uW0TcLrU1nuf&0tcJrF7Fi
ew6lxqK;K%)!k_<W?kdn~B`vB6lg2b*O}?+;q))0QZI!JkK4_?+?=pYBpbh2S}HZz7!Tq7alVDGN(VHu%g4`kWRLmbO)Y98BG3
%%9cu5&=4gc>M27BTCxYLT9Q@w8pl1O@LY%WRvUC<43}582sLXaHQ_}#{?b6F0I%BcIy`9o8{&;720^faC;BbBMPkmE7*|kIT*
l<M1Cxj=m}FcoQgK^261N$nWS&*)ZtIlsRlx^)2m9BGBE+>{<>*I+o6*QlM0PT=Q<0sC>}+JuRir+uDE!zPgNU7tvAc+sd@}N}
_WLhy{k1>Jo$vBsU4NGF4|^<Sp#
"""
EXPECTED = {
    "weight": np.array([[0, 1, 2], [3, 4, 5]], np.float32),
    "transposed": np.array([[0, 3], [1, 4], [2, 5]], np.int32),
    "slice": np.array([3, 5, 7], np.float64),
    "same_storage": np.array([1, 2], np.float64),
    "scalar": np.array(-7, np.int64),
    "half": np.array([0.5, -2], np.float16),
    "bfloat16": np.array([1.5, -0.25], np.float32),
    "flags": np.array([True, False, True]),
    "empty": np.zeros((0, 5), np.float32),
}


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b85decode("".join(text.split())))


GOLDEN = {"zip": _unpacked(ZIP_FILE), "legacy": _unpacked(LEGACY_FILE)}


@pytest.mark.parametrize("layout", GOLDEN)
def test_reads_what_pytorch_wrote(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "state.pth"
    path.write_bytes(GOLDEN[layout])
    state = read_state_dict(path)
    assert list(state) == list(EXPECTED)
    for name, expected in EXPECTED.items():
        assert state[name].dtype == expected.dtype, name
        assert state[name].flags.c_contiguous and state[name].flags.writeable, name
        np.testing.assert_array_equal(state[name], expected, strict=True)


# --- A writer of files that PyTorch would not write -----------------------------------------------


class Storage:
    """Pickled as a reference to the storage `key`, of `elements` numbers."""

    def __init__(self, key: str, elements: Any, type_name: str = "FloatStorage") -> None:
        self.key, self.elements, self.type_name = key, elements, type_name


class Tensor:
    """Pickled as a call of `torch._utils._rebuild_tensor_v2`."""

    def __init__(self, storage: Any, offset: Any, shape: Any, strides: Any) -> None:
        self.arguments = (storage, offset, shape, strides, False, OrderedDict())

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.modules["torch._utils"]._rebuild_tensor_v2, self.arguments


class Call:
    """Pickled as a call of any function with any arguments."""

    def __init__(self, function: Callable, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Storage):
            return None
        storage_type = getattr(sys.modules["torch"], value.type_name)
        return ("storage", storage_type, value.key, "cpu", value.elements)


@pytest.fixture(autouse=True)
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the pickler the names that it needs to write; the reader imports none of them."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")

    def _rebuild_tensor_v2(*_: Any) -> None:
        raise AssertionError("the reader called what the file named")

    for module, value in (
        (utils, _rebuild_tensor_v2),
        (torch, type("FloatStorage", (), {})),
        (torch, type("LongStorage", (), {})),
        (torch, type("QInt8Storage", (), {})),
    ):
        value.__module__, value.__qualname__ = module.__name__, value.__name__
        setattr(module, value.__name__, value)
    torch._utils = utils
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)


def pickled(root: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(root)
    return stream.getvalue()


def zip_file(
    path: Path, data_pickle: bytes, blocks: dict[str, bytes], compression: int = zipfile.ZIP_STORED
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data_pickle)
        for key, block in blocks.items():
            archive.writestr(f"archive/data/{key}", block)
    return path


def legacy_file(path: Path, data_pickle: bytes, blocks: dict[str, bytes]) -> Path:
    machine = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    content = b"".join(
        pickle.dumps(value, protocol=2) for value in (0x1950A86A20F9469CFC6C, 1001, machine)
    )
    content += data_pickle + pickle.dumps(list(blocks), protocol=2)
    for block in blocks.values():
        content += struct.pack("<q", len(block) // 4) + block
    path.write_bytes(content)
    return path


WRITERS = pytest.mark.parametrize("write", [zip_file, legacy_file])
SIX = np.arange(6, dtype="<f4").tobytes()


def refusal(path: Path, **limits: int) -> str:
    """Returns the message with which a file is refused: one line that names the file."""
    with pytest.raises(InputError) as caught:
        read_state_dict(path, **limits)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


@WRITERS
def test_the_writer_of_these_tests_writes_readable_files(tmp_path: Path, write: Callable) -> None:
    tensor = Tensor(Storage("a", 6), 1, (2, 2), (3, 1))
    state = read_state_dict(write(tmp_path / "state.pth", pickled({"w": tensor}), {"a": SIX}))
    np.testing.assert_array_equal(state["w"], np.array([[1, 2], [4, 5]], np.float32), strict=True)


# --- Hostile files --------------------------------------------------------------------------------


@WRITERS
def test_code_in_a_file_is_not_run(tmp_path: Path, write: Callable) -> None:
    marker = tmp_path / "executed"
    attack = pickled({"w": Call(os.system, f"touch {marker}")})
    pickle.loads(attack)
    assert marker.exists(), "the attack itself must work, or this test shows nothing"
    marker.unlink()

    assert "system" in refusal(write(tmp_path / "state.pth", attack, {}))
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "builtins\neval",
        "builtins\ngetattr",
        "collections\ndefaultdict",
        "collections\nOrderedDict.fromkeys",
        "torch\nload",
        "torch\nQInt8Storage",
        "torch._utils\n_rebuild_tensor",
        "numpy\nFloatStorage",
    ],
)
def test_every_other_name_is_refused(tmp_path: Path, name: str) -> None:
    path = zip_file(tmp_path / "state.pth", b"\x80\x02c" + name.encode() + b"\n.", {})
    assert f"it asks for {name.replace(chr(10), '.')}" in refusal(path)


@pytest.mark.parametrize(
    ("opcode", "body"),
    [
        ("INST", b"(ios\nsystem\n."),
        ("OBJ", b"(}o."),
        ("NEWOBJ", b"))\x81."),
        ("EXT1", b"\x82\x01."),
        ("PERSID", b"Pkey\n."),
    ],
)
def test_opcodes_that_no_state_dict_needs_are_refused(
    tmp_path: Path, opcode: str, body: bytes
) -> None:
    path = zip_file(tmp_path / "state.pth", b"\x80\x02" + body, {})
    assert f"opcode {opcode} " in refusal(path)


def test_a_memo_index_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    body = b"\x80\x02}r" + struct.pack("<I", 2**31) + b"."
    assert "memo index" in refusal(zip_file(tmp_path / "state.pth", body, {}))


def test_attributes_set_on_the_rebuilding_function_do_not_outlive_the_file(tmp_path: Path) -> None:
    # BUILD with (None, {"__kwdefaults__": ..., "__defaults__": ...}) on the function.
    attack = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__)s\x86b."
    refusal(zip_file(tmp_path / "attack.pth", attack, {}))
    tensor = Tensor(Storage("a", 6), 0, (6,), (1,))
    path = zip_file(tmp_path / "state.pth", pickled({"w": tensor}), {"a": SIX})
    assert read_state_dict(path)["w"].shape == (6,)


# --- Files that do not add up ---------------------------------------------------------------------


@WRITERS
@pytest.mark.parametrize(
    ("offset", "shape", "strides", "reason"),
    [
        (0, (7,), (1,), "beyond its storage"),
        (1, (6,), (1,), "beyond its storage"),
        (6, (), (), "beyond its storage"),
        (0, (2, 3), (4, 1), "beyond its storage"),
        (2**62, (2,), (2**62,), "beyond its storage"),
        (-1, (2,), (1,), "malformed tensor"),
        (0, (-2,), (1,), "malformed tensor"),
        (5, (2,), (-1,), "malformed tensor"),
        (0, (2, 3), (1,), "malformed tensor"),
        (0, (True,), (1,), "malformed tensor"),
        (0, [2], (1,), "malformed tensor"),
        ("0", (2,), (1,), "malformed tensor"),
        (0, (2**62,), (0,), "need more than"),
    ],
)
def test_tensors_must_lie_within_their_storage(
    tmp_path: Path, write: Callable, offset: Any, shape: Any, strides: Any, reason: str
) -> None:
    tensor = Tensor(Storage("a", 6), offset, shape, strides)
    assert reason in refusal(write(tmp_path / "state.pth", pickled({"w": tensor}), {"a": SIX}))


@pytest.mark.parametrize(
    ("root", "reason"),
    [
        ({}, "no dictionary of tensors"),
        (["w"], "no dictionary of tensors"),
        (5, "no dictionary of tensors"),
        ({"epoch": 3}, "entry 'epoch' is not a tensor"),
        ({"state_dict": {"w": Tensor(Storage("a", 6), 0, (6,), (1,))}}, "entry 'state_dict'"),
        ({7: Tensor(Storage("a", 6), 0, (6,), (1,))}, "entry 7 is not a tensor"),
        ({"w": Storage("a", 6)}, "entry 'w' is not a tensor"),
        ({"w": Tensor("a", 0, (6,), (1,))}, "malformed tensor"),
        ({"w": Storage("a", -6)}, "malformed storage"),
        ({"w": Storage("a", "6")}, "malformed storage"),
        ([Storage("a", 6), Storage("a", 5)], "described in two ways"),
        ([Storage("a", 6), Storage("a", 6, "LongStorage")], "described in two ways"),
    ],
)
def test_only_named_tensors_are_a_state_dict(tmp_path: Path, root: Any, reason: str) -> None:
    assert reason in refusal(zip_file(tmp_path / "state.pth", pickled(root), {"a": SIX}))


def test_a_storage_must_have_the_bytes_that_it_claims(tmp_path: Path) -> None:
    data_pickle = pickled({"w": Tensor(Storage("a", 6), 0, (2,), (1,))})
    path = tmp_path / "state.pth"
    assert "20 bytes, not 6 items" in refusal(zip_file(path, data_pickle, {"a": SIX[:-4]}))
    assert "data/a" in refusal(zip_file(path, data_pickle, {}))
    assert "is truncated" in refusal(legacy_file(path, data_pickle, {"a": SIX[:-4]}))
    assert "does not match its tensors" in refusal(legacy_file(path, data_pickle, {"b": SIX}))
    assert "does not match its tensors" in refusal(legacy_file(path, data_pickle, {}))


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pth"
    path.write_bytes(GOLDEN["zip"])
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, b"big" if name.endswith("byteorder") else part)
    assert "big-endian" in refusal(path)
    path.write_bytes(GOLDEN["legacy"].replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89"))
    assert "big-endian" in refusal(path)


# --- Limits ---------------------------------------------------------------------------------------


def test_limits(tmp_path: Path) -> None:
    path = tmp_path / "state.pth"
    path.write_bytes(GOLDEN["legacy"])
    size = path.stat().st_size
    assert len(read_state_dict(path, max_bytes=size, max_tensors=9)) == 9
    assert f"{size} bytes" in refusal(path, max_bytes=size - 1)
    assert "9 tensors" in refusal(path, max_tensors=8)


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    data_pickle = pickled({"w": Tensor(Storage("a", 6), 0, (6,), (1,))})
    path = zip_file(tmp_path / "state.pth", data_pickle, {"a": bytes(10**6)}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10**4
    assert "unpacks to more than 100000 bytes" in refusal(path, max_bytes=10**5)


def test_a_tensor_that_is_larger_than_its_storage_counts_in_full(tmp_path: Path) -> None:
    expanded = {"w": Tensor(Storage("a", 6), 0, (1009, 1013), (0, 0))}
    path = zip_file(tmp_path / "state.pth", pickled(expanded), {"a": SIX})
    assert "need more than 4000000 bytes" in refusal(path, max_bytes=4_000_000)
    assert read_state_dict(path, max_bytes=5_000_000)["w"].shape == (1009, 1013)


# --- Damaged files --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", GOLDEN)
def test_truncated_files_are_refused(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "state.pth"
    content = GOLDEN[layout]
    for length in range(0, len(content), 13):
        path.write_bytes(content[:length])
        refusal(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pth"
    for content in (b"", b"a line of text\n", np.random.default_rng(7).bytes(4099)):
        path.write_bytes(content)
        assert "not a usable PyTorch state dict" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "no data.pkl" in refusal(path)
    assert "No such file" in refusal(tmp_path / "absent.pth")
    assert "directory" in refusal(tmp_path).lower()


@settings(max_examples=300, deadline=None)
@given(
    layout=st.sampled_from(sorted(GOLDEN)),
    position=st.floats(0, 1, exclude_max=True),
    byte=st.integers(0, 255),
)
def test_a_damaged_byte_gives_numbers_or_one_clear_line(
    tmp_path_factory: pytest.TempPathFactory, layout: str, position: float, byte: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.pth"
    content = bytearray(GOLDEN[layout])
    content[int(position * len(content))] = byte
    path.write_bytes(content)
    try:
        state = read_state_dict(path)
    except InputError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert all(isinstance(array, np.ndarray) for array in state.values())
