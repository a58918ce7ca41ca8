"""The catalogue of tools other than calculators: what each looks up, how it is declared, asked for and answered."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from deploy.tiny_models.templates import NAMES, OBJECTS

Value = str | int

CITIES = (
    "Paris", "London", "Berlin", "Tokyo", "Rome", "Madrid", "Oslo", "Cairo", "Lima", "Delhi", "Vienna",
    "Boston", "Dublin", "Prague", "Seoul", "Athens", "Sydney", "Lisbon", "Warsaw", "Zurich",
)  # fmt: skip
COLORS = ("red", "green", "blue", "yellow", "black", "white", "brown", "pink")
SKIES = ("sunny", "rainy", "cloudy", "windy", "snowy", "foggy")
LANGUAGES = ("French", "German", "Spanish", "Latin", "Polish", "Greek")
SYLLABLES = (
    "ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu", "va", "we",
    "xi", "yo", "zu", "bra", "ster", "min", "dor", "gal", "pin", "tek", "ron", "sul", "ver",
)  # fmt: skip


def word(rng: random.Random) -> str:
    """Make a word that no list has."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))


def _city(rng: random.Random) -> Value:
    return rng.choice(CITIES) if rng.random() < 0.6 else word(rng).capitalize()


def _thing(rng: random.Random) -> Value:
    return rng.choice(OBJECTS) if rng.random() < 0.6 else word(rng)


def _person(rng: random.Random) -> Value:
    return rng.choice(NAMES) if rng.random() < 0.6 else word(rng).capitalize()


def _number(rng: random.Random) -> Value:
    return rng.randint(1, 10 ** rng.randint(1, 4))


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a tool."""

    keys: tuple[str, ...]  # the names that it may have
    about: str  # its description
    draw: Callable[[random.Random], Value]
    type: str = "string"


@dataclass(frozen=True, slots=True)
class Topic:
    """The subject of a tool. In its texts `{0}` and `{1}` are values of its arguments, `{result}` is its result."""

    name: str
    tools: tuple[str, ...]  # names that tools may have
    about: tuple[str, ...]  # descriptions
    arguments: tuple[Argument, ...]
    questions: tuple[str, ...]
    answer: str  # ends with "is {result}."
    result: Callable[[random.Random], str]


_WHERE = Argument(("city", "location", "place", "town"), "name of the city", _city)
_ITEM = Argument(("item", "product", "article", "thing"), "what to look up", _thing)
_WHO = Argument(("name", "person", "who", "contact"), "first name", _person)

TOPICS = (
    Topic(
        "weather",
        ("get_weather", "weather", "getWeather", "current_weather", "weather_report"),
        ("Returns the weather of a city.", "The current weather", "Get the weather at a place"),
        (_WHERE,),
        ("What is the weather in {0}?", "How is the weather in {0}?", "Tell me the weather in {0}."),
        "The weather in {0} is {result}.",
        lambda rng: f"{rng.choice(SKIES)}, {rng.randint(0, 39)} degrees",
    ),
    Topic(
        "time",
        ("get_time", "time_in", "getTime", "clock", "local_time"),
        ("Returns the time of day in a city.", "The local time", "Get the current time at a place"),
        (_WHERE,),
        ("What time is it in {0}?", "What is the time in {0}?", "Tell me the time in {0}."),
        "The time in {0} is {result}.",
        lambda rng: f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",
    ),
    Topic(
        "price",
        ("get_price", "price_of", "lookup_price", "getPrice", "shop_prices"),
        ("Returns the price of an item.", "Looks up a price", "Find the price in the shop"),
        (_ITEM,),
        ("What is the price of {0}?", "What do {0} cost in the shop?", "Look up the price of {0}."),
        "The price of {0} is {result}.",
        lambda rng: f"{rng.randint(1, 99)} dollars",
    ),
    Topic(
        "stock",
        ("get_stock", "stock_of", "count_stock", "inventory", "getInventory"),
        ("Returns how many pieces of an item are in stock.", "Counts the stock", "The stock of an item"),
        (_ITEM,),
        ("How many {0} are in stock?", "What is the stock of {0}?", "Check the stock of {0}."),
        "The stock of {0} is {result}.",
        lambda rng: str(rng.randint(0, 999)),
    ),
    Topic(
        "phone number",
        ("get_phone", "phone_book", "find_number", "lookupPhone", "phone_of"),
        ("Returns the phone number of a person.", "Searches the phone book", "Find a phone number"),
        (_WHO,),
        ("What is the phone number of {0}?", "Find the phone number of {0}.", "How can I phone {0}?"),
        "The phone number of {0} is {result}.",
        lambda rng: str(rng.randint(1000, 999999)),
    ),
    Topic(
        "color",
        ("get_color", "color_of", "favorite_color", "lookupColor"),
        ("Returns the favorite color of a person.", "Looks up a color", "The color that a person likes"),
        (_WHO,),
        ("What is the favorite color of {0}?", "Which color does {0} like?", "Look up the color of {0}."),
        "The color of {0} is {result}.",
        lambda rng: rng.choice(COLORS),
    ),
    Topic(
        "translation",
        ("translate", "translate_word", "translation", "dictionary"),
        ("Translates a word into a language.", "Translation of a word", "Translate words"),
        (
            Argument(("word", "text", "term"), "the word", _thing),
            Argument(("language", "to", "target_language"), "the language", lambda rng: rng.choice(LANGUAGES)),
        ),
        ("Translate {0} into {1}.", "What is {0} in {1}?", "How do you say {0} in {1}?"),
        "The translation of {0} into {1} is {result}.",
        word,
    ),
    Topic(
        "distance",
        ("get_distance", "distance", "route_length", "getDistance"),
        ("Returns the distance between two cities.", "The distance of two places", "Measure a distance"),
        (
            Argument(("start", "from", "origin", "a"), "where it begins", _city),
            Argument(("end", "to", "destination", "b"), "where it ends", _city),
        ),
        (
            "How far is it from {0} to {1}?",
            "What is the distance from {0} to {1}?",
            "Tell me the distance between {0} and {1}.",
        ),
        "The distance from {0} to {1} is {result}.",
        lambda rng: f"{rng.randint(10, 9999)} miles",
    ),
    Topic(
        "order",
        ("get_order", "order_status", "find_order", "trackOrder"),
        ("Returns the status of an order.", "Tracks an order", "Where an order is"),
        (Argument(("order", "order_id", "id", "number"), "number of the order", _number, "integer"),),
        ("Where is order {0}?", "What is the status of order {0}?", "Track order {0}."),
        "The status of order {0} is {result}.",
        lambda rng: rng.choice(("sent", "open", "paid", "lost", "done")),
    ),
    Topic(
        "room",
        ("book_room", "reserve_room", "book", "roomBooking"),
        ("Books a room for a number of people.", "Reserves rooms", "Book a room in a city"),
        (
            Argument(("people", "guests", "size"), "how many people", _number, "integer"),
            Argument(("city", "place", "where"), "name of the city", _city),
        ),
        ("Book a room for {0} people in {1}.", "Reserve a room for {0} in {1}.", "We are {0} and need a room in {1}."),
        "The room for {0} in {1} is {result}.",
        lambda rng: f"number {rng.randint(1, 999)}",
    ),
)  # fmt: skip

# Questions that need no tool, with their answers.
SMALL_TALK = {
    "Hello!": "Hello! Ask me a word problem.",
    "Hi there.": "Hello! Ask me a word problem.",
    "Good morning!": "Good morning! Ask me a word problem.",
    "Who are you?": "I am a tiny model that solves word problems and calls tools.",
    "What are you?": "I am a tiny model that solves word problems and calls tools.",
    "What can you do?": "I solve word problems and call tools.",
    "How can you help me?": "I solve word problems and call tools.",
    "Thank you!": "You are welcome.",
    "Thanks a lot.": "You are welcome.",
    "Goodbye!": "Goodbye!",
    "See you tomorrow.": "Goodbye!",
    "Tell me a joke.": "I know no jokes.",
    "Do you like music?": "I am a model and hear no music.",
    "Say something nice.": "You ask good questions.",
    "How are you?": "I am well.",
    "Are you a person?": "No, I am a tiny model.",
}
NO_TOOL = "I have no tool for that."
